terraform {
  required_version = ">= 1.11.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.0"
    }
  }

  # The state holds the bundles in clear: keep it encrypted, and let few people read it.
  # terraform init -backend-config=… names the bucket, the key and the region.
  backend "s3" {
    encrypt      = true
    use_lockfile = true
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { MusterCluster = var.cluster }
  }
}
