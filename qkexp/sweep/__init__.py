"""Many runs: plan, launch, status."""
