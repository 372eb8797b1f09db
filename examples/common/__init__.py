"""What the MNIST examples share: data sets, arguments, progress, results. Importing it needs none of the frameworks."""
