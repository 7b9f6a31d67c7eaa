"""The tests of the example project are run by a pytest of their own."""

collect_ignore = ["testing_project"]
