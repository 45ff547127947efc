"""Load tests that end at the stop lines (`stopline ramp`) and what they tell beside each other (`stopline compare`)."""
