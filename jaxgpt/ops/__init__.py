"""Functions of arrays: no parameters, no config, no files. Each fast version stands beside the plain one it equals."""
