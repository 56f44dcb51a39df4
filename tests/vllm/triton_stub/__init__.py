"""A Triton backend named `cpu` that compiles nothing: under TRITON_INTERPRET=1 kernels run in numpy.

vLLM on CPU reports routed experts through Triton kernels, and asks for a backend of this name first.
"""
