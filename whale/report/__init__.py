def print_plan(plan, console=None): pass
