"""Recipe of LoopKV's reference model: corpus, tokenizer, tasks, training, evaluation.

The flow, one module per arrow::

    sources -> fetch -> extract -> corpus -> tokenizer -> train -> export -> evaluate
                                     tasks ------------------^-----------------^
"""
