"""Machines that are not here: topologies, compiled programs read as text, estimates."""
