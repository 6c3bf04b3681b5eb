"""Pure functions of arrays, without parameters or config. Tests hold each optimized version to the plain one it equals."""
