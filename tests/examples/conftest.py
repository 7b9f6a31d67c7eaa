"""The tests of the example project are run by a pytest of their own."""

collect_ignore = ["shop_project"]
