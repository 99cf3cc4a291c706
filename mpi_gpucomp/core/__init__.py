"""The data plane, in C++: it moves, encodes and decodes chunks without Python. Here are its bindings."""
