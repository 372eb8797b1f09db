"""What the MNIST examples of every framework share: data sets, arguments, results. No framework is imported here."""
