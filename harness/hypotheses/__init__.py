"""Further questions to ask of failing checks, each of which proposes what the engine of core/causes then judges again.

Whose value is it, which recipe leads there, which samples and positions were fed, what a resumed launch lost, what was exported
or reported, where backward goes wrong.
"""
