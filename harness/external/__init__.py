"""Arms that another library's trainer trains, under the harness's data, reward and budget.

``arm``: what such an arm is; ``objective`` and ``settings``: how it is said to the trainer;
``trainer`` and ``run``: the trainer itself, and the harness's steps made of its events.
"""
