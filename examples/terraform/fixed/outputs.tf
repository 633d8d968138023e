output "addresses" {
  description = "Private addresses of the members by name."
  value       = { for name, member in aws_instance.member : name => member.private_ip }
}

output "security_group_id" {
  description = "Security group of the members: admit it at the discovery service and the mirror."
  value       = module.network.security_group_id
}
