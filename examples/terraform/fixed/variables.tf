variable "region" {
  description = "AWS region."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster, as in `muster-discovery cluster create NAME`."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the members."
  type        = string
}

variable "image_id" {
  description = "AMI of Debian 12 or newer, with cloud-init."
  type        = string
}

variable "instance_type" {
  description = "Instance type of the members."
  type        = string
  default     = "m7i.large"
}

variable "disk_gib" {
  description = "Size of each member's disk, in GiB."
  type        = number
  default     = 20
}

variable "disk_key_arn" {
  description = "ARN of the KMS key that encrypts the disks; null for the account's default key."
  type        = string
  default     = null
}

variable "packages" {
  description = "URLs and SHA-256 hashes of the Debian packages muster-agent and muster-node on your own mirror."
  type = list(object({
    url    = string
    sha256 = string
  }))

  validation {
    condition     = alltrue([for package in var.packages : can(regex("^https://[^'[:space:]]+$", package.url))])
    error_message = "Each package needs an https:// URL without spaces and quotes."
  }

  validation {
    condition     = alltrue([for package in var.packages : can(regex("^[0-9a-f]{64}$", package.sha256))])
    error_message = "Each package needs its SHA-256 hash, as the file SHA256SUMS of `make dist` has it."
  }
}

variable "discovery_cidrs" {
  description = "Addresses of the discovery service, such as 10.1.0.2/32."
  type        = set(string)
}

variable "discovery_port" {
  description = "Port of the discovery service."
  type        = number
  default     = 8443
}

variable "https_cidrs" {
  description = "Networks that members reach by HTTPS: the mirror of packages."
  type        = set(string)
}

variable "client_security_group_ids" {
  description = "Security groups whose machines may reach the members' client port."
  type        = set(string)
  default     = []
}

variable "members" {
  description = "Members by name: the subnet of each, and its private address, which its bundle is bound to."
  type = map(object({
    subnet_id = string
    address   = string
  }))

  validation {
    condition     = length(var.members) % 2 == 1
    error_message = "A cluster has an odd number of members: one more tolerates no further failure."
  }
}

variable "bundles" {
  description = "Join bundle of each member by name, as `muster-discovery token create --out` writes it."
  type        = map(string)
  sensitive   = true

  validation {
    condition     = alltrue([for name, _ in var.members : can(regex("^muster1 [^\n]+\n?$", var.bundles[name]))])
    error_message = "Each member needs a bundle: one line, as `muster-discovery token create --out` writes it."
  }
}
