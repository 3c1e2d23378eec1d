"""Prompts continued within a program, without a server.

`Engine` starts the same processes without HTTP; they end with the program, even if it is killed.
"""

from headrace import Engine, SamplingParams

PROMPTS = ["1, 2, 3,", "A, B, C,", "The capital of France is"]

with Engine() as engine:
    for output in engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10)):
        print(f"{output.prompt}{output.text}")
