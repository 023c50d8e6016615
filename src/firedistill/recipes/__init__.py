"""Recipes that come with the package: YAML files whose keys are the fields of `SelfDistillConfig`."""
