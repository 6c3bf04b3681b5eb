"""Exercises of the course with their checks, and a drawing of a model's architecture.

jaxgpt_course.exercises()                    # the ten functions to write
jaxgpt_course.check("attention", my_attend)  # what holds, or what is wrong and why
jaxgpt_course.architecture(config)           # SVG
"""

from jaxgpt_course.architecture import architecture
from jaxgpt_course.checker import Result, check, exercises
from jaxgpt_course.exercise import Exercise

__all__ = ["Exercise", "Result", "architecture", "check", "exercises"]
