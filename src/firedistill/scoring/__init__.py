"""Scoring fixed responses."""
