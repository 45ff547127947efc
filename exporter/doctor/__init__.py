"""``stopline doctor``: is it set up right? One file for each thing that is looked at."""
