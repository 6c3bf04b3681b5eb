"""Plan runs on absent hardware: topologies, analysis of compiled programs, estimates."""
