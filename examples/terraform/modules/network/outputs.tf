output "security_group_id" {
  description = "Security group of the members."
  value       = aws_security_group.members.id
}
