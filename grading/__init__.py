"""When two answers are equal. Nothing here knows anything else of this project."""
