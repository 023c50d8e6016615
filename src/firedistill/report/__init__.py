"""Tables, figures and a page of runs and suites."""
