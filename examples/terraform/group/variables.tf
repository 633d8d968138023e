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
  description = "AMI of Debian 12 or newer, with cloud-init and the AWS CLI (Debian package awscli)."
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
  description = "ARN of the KMS key that encrypts the disks; null for the default key. The service-linked role of Auto Scaling has to be allowed to use it."
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
  description = "Networks that members reach by HTTPS: the mirror of packages, and the endpoint of SSM."
  type        = set(string)
}

variable "client_security_group_ids" {
  description = "Security groups whose machines may reach the members' client port."
  type        = set(string)
  default     = []
}

variable "subnet_ids" {
  description = "Subnets of the group. For --spread zone, give one in each of three zones."
  type        = list(string)
}

variable "machines" {
  description = "Number of machines: the cluster's size, and one more for each standby that is to be there before a member dies."
  type        = number
  default     = 3
}

variable "bundle" {
  description = "The policy's join bundle, as `muster-discovery policy create --out` writes it."
  type        = string
  sensitive   = true
  ephemeral   = true

  validation {
    condition     = can(regex("^muster1 [^\n]+\n?$", var.bundle))
    error_message = "The bundle is one line, as `muster-discovery policy create --out` writes it."
  }
}

variable "bundle_version" {
  description = "Raise it with each new bundle: Terraform can't compare a value that it doesn't keep."
  type        = number
  default     = 1
}
