"""Recipes that come with the project, and the tasks they train on."""
