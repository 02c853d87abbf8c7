"""vLLM as a generator: `rollout.engine=vllm`.

Invariant: vLLM runs the model and its cache, and nothing else. Tokens are drawn, responses end and turns pause by the project's own
code, so that a trajectory means the same as in the built-in engine. vLLM is imported only where this engine is chosen.
Start reading at `engine.py` (the calls that become vLLM's), then `sampler.py` (how tokens are drawn inside vLLM).
"""
