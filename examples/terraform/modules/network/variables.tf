variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the members."
  type        = string
}

variable "discovery_cidrs" {
  description = "Addresses of the discovery service."
  type        = set(string)
}

variable "discovery_port" {
  description = "Port of the discovery service."
  type        = number
}

variable "https_cidrs" {
  description = "Networks that members reach by HTTPS: the mirror of packages, endpoints of AWS."
  type        = set(string)
}

variable "client_security_group_ids" {
  description = "Security groups whose machines may reach the client port."
  type        = set(string)
}
