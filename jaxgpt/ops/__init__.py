"""Pure functions of arrays, without parameters or config. Tests compare each optimized version with a plain one."""
