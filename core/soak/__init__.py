"""Random lives of an engine, with load and faults, against a model of what has to be true."""
