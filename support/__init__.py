"""What the six files at the top rest on: one concept a file, opened when needed.

    a run           settings  presets  models  learner  run  batches  storage  evaluation  trackers
    before it       checks  rehearsal  memory  plan  errors
    more hardware   processes  vllm  adapters
    problems        tasks  arithmetic  tiny
    equal answers   equality, and what it asks: spelling  lists  quantities  expressions;
                    judges and algebra: the process that can be killed

Nothing here imports train.py or bench.py.
"""
