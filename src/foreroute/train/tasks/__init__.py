"""What the trainer trains on: problems, their tokens, and the rewards of responses. A file for each kind of task."""

from foreroute.train.tasks.make import make_task
from foreroute.train.tasks.task import Lesson, Problem, Task

__all__ = ["Lesson", "Problem", "Task", "make_task"]
