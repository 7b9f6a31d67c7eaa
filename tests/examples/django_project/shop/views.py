"""The view: an order and the job that confirms it are one transaction."""

from django.db import IntegrityError, connection, transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_POST

from shop.jobs import confirm
from shop.models import Order, Stock


@require_POST
def place(request: HttpRequest) -> HttpResponse:
    item = request.POST["item"]
    try:
        with transaction.atomic():
            order = Order.objects.create(item_id=item)
            confirm.on(connection).enqueue_sync(order_id=order.pk)
            Stock.objects.filter(item=item).update(left=F("left") - 1)
    except IntegrityError:  # sold out: neither order nor job is there
        return JsonResponse({"error": "sold out"}, status=409)
    return JsonResponse({"order": order.pk}, status=201)
