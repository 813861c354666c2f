"""kvlab measures, on your own machine, what KV-cache offloading does for vLLM.

This file stays free of imports: the engine environment imports ``kvlab.engine`` through it.
"""

__version__ = "0.1.0"
