"""The module that `taskd run --app shop.worker` imports: Django, then the tasks, which need it."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from shop import jobs  # noqa: E402, F401
