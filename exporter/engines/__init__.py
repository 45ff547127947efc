"""What Stopline knows of each inference engine: one data file per engine, and the code that reads them."""
