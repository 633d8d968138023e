output "autoscaling_group" {
  description = "Name of the auto-scaling group."
  value       = aws_autoscaling_group.members.name
}

output "security_group_id" {
  description = "Security group of the members: admit it at the discovery service and the mirror."
  value       = module.network.security_group_id
}
