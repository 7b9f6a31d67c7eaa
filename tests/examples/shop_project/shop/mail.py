"""The shop's way to send mail; tests put something else in its place."""


async def send(to: str, text: str) -> None:
    raise OSError(f"there is no mail server here for {to}: {text}")
