"""How fast a run is: its samples and tokens a second, and its share of what the device can compute."""
