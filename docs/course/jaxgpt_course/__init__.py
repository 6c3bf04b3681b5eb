"""Exercises of the course with their checks, and a drawing of a model's architecture.

jaxgpt_course.exercises()                    # the functions to write
jaxgpt_course.check("attention", my_attend)  # the inputs with correct results, or the error and its likely cause
jaxgpt_course.score(globals())               # checks of all exercises
jaxgpt_course.architecture(config)           # SVG
"""

from jaxgpt_course.architecture import architecture
from jaxgpt_course.checker import Result, Score, check, exercises, score
from jaxgpt_course.exercise import Exercise

__all__ = ["Exercise", "Result", "Score", "architecture", "check", "exercises", "score"]
