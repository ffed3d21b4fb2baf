"""The main job: measure a model with its own cache and with quantized ones, on the same inputs, and say which format is safe.

options.py   what to measure and how much of it       passages.py    real text, cut
arms.py      a cache that takes part                  forks.py       one prefix, many endings, one forward
fidelity.py  KL, top-1, perplexity                    needles.py     retrieval by depth and length
speed.py     memory.py   filling.py                   json_check.py  extraction
result.py    what was found: the JSON schema          verdict.py     recommend.py   what it means: pure
prepare.py   run.py      conclude.py                  stage.py       threads.py     machine.py
command.py   progress.py render.py   files.py         report.py      svg.py         report.html.j2
"""
