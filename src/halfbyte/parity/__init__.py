"""Is a recipe as good as another? Paired runs over seeds, an equivalence test with a margin fixed beforehand, one
verdict, and a report."""
