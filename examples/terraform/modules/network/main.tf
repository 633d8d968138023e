# Security group of a cluster's members. Members admit each other and the named clients, and reach nothing else than each
# other, the discovery service and HTTPS servers that the operator names.
resource "aws_security_group" "members" {
  # A prefix and create_before_destroy let a group that has to be replaced be replaced while members use it.
  name_prefix = "muster-${var.cluster}-"
  description = "Members of the Muster cluster ${var.cluster}"
  vpc_id      = var.vpc_id
  tags        = { Name = "muster-${var.cluster}" }

  lifecycle {
    create_before_destroy = true
  }
}

# A member's agent asks the other members' client ports, too: whether they answer, and who leads.
resource "aws_vpc_security_group_ingress_rule" "members" {
  for_each = local.member_ports

  security_group_id            = aws_security_group.members.id
  description                  = "${each.key} port, from other members"
  referenced_security_group_id = aws_security_group.members.id
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
}

resource "aws_vpc_security_group_egress_rule" "members" {
  for_each = local.member_ports

  security_group_id            = aws_security_group.members.id
  description                  = "${each.key} port, to other members"
  referenced_security_group_id = aws_security_group.members.id
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = var.client_security_group_ids

  security_group_id            = aws_security_group.members.id
  description                  = "Client port, from clients"
  referenced_security_group_id = each.value
  ip_protocol                  = "tcp"
  from_port                    = local.member_ports["Client"]
  to_port                      = local.member_ports["Client"]
}

resource "aws_vpc_security_group_egress_rule" "discovery" {
  for_each = var.discovery_cidrs

  security_group_id = aws_security_group.members.id
  description       = "Discovery service"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = var.discovery_port
  to_port           = var.discovery_port
}

resource "aws_vpc_security_group_egress_rule" "https" {
  for_each = var.https_cidrs

  security_group_id = aws_security_group.members.id
  description       = "HTTPS: mirror of packages, endpoints of AWS"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

locals {
  # The agent's defaults: muster-agent run --peer-port and --client-port.
  member_ports = { Peer = 2380, Client = 2379 }
}
