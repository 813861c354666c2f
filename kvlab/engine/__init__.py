"""What runs inside the engine's own environment: the only code that imports torch, vllm or lmcache.

The lab never imports this package. It starts these modules by name with the engine's Python
(`kvlab.environment.engine_python`), so the two environments stay apart.
"""
