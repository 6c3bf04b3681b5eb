"""Exercises of the course, and their check.

jaxgpt.course.exercises()                    # the ten functions to write
jaxgpt.course.check("attention", my_attend)  # what holds, or what is wrong and why
"""

from jaxgpt.course.checker import Result, check, exercises
from jaxgpt.course.exercise import Exercise

__all__ = ["Exercise", "Result", "check", "exercises"]
