def page(values): return ""
