"""What the seven files at the top rest on: one concept a file, opened when needed.

    a run           settings  presets  models  learner  run  batches  storage  files  evaluation
    before it       checks  rehearsal  memory  plan  errors
    more            processes  stopping  vllm  adapters  trackers
    problems        tasks  arithmetic  tiny

Nothing here imports train.py or bench.py.
"""
