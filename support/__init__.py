"""What the seven files at the top rest on: one concept a file, opened when needed.

    a run           settings  presets  run  data  models  adapters  learner  evaluation
    before it       rehearsal  plan  errors
    on disk         storage  page  trackers
    more            processes  vllm  own_reward
    problems        tasks  arithmetic  tiny

Nothing here imports train.py or bench.py.
"""
