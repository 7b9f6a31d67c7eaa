"""What is there, and what was ordered."""

from django.db import models


class Stock(models.Model):
    item = models.CharField(primary_key=True, max_length=50)
    left = models.PositiveIntegerField()  # PostgreSQL refuses one below zero


class Order(models.Model):
    item = models.ForeignKey(Stock, on_delete=models.CASCADE)
    confirmed = models.BooleanField(default=False)
