"""Plan runs on hardware you do not have: topologies, estimates, and the analysis of compiled programs."""
