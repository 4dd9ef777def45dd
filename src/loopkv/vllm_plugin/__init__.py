"""LoopKV inside stock vLLM: everything that touches vLLM lives in this package.

``vllm serve MODEL --additional-config '{"loopkv": {"plan": "plan.json"}}'``. vLLM finds ``register`` through the entry
point ``vllm.general_plugins``; without the ``loopkv`` settings nothing of an engine changes.
"""
