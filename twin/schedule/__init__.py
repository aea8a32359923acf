"""How a device's kernel runs a plan: frozen, made once by `schedule_of`, passed along."""
