# A cluster of machines that are known by name, each with a bundle of its own.
module "network" {
  source = "../modules/network"

  cluster                   = var.cluster
  vpc_id                    = var.vpc_id
  discovery_cidrs           = var.discovery_cidrs
  discovery_port            = var.discovery_port
  https_cidrs               = var.https_cidrs
  client_security_group_ids = var.client_security_group_ids
}

resource "aws_instance" "member" {
  #checkov:skip=CKV2_AWS_41: Members call no API of AWS, so that they need no role.
  for_each = var.members

  ami                         = var.image_id
  instance_type               = var.instance_type
  subnet_id                   = each.value.subnet_id
  private_ip                  = each.value.address
  associate_public_ip_address = false
  vpc_security_group_ids      = [module.network.security_group_id]
  ebs_optimized               = true
  monitoring                  = true
  disable_api_termination     = true
  tags                        = { Name = each.key }

  user_data = templatefile("${path.module}/user-data.yaml.tftpl", {
    bundle   = jsonencode("${chomp(var.bundles[each.key])}\n")
    name     = each.key
    packages = join(" ", [for package in var.packages : "'${package.url} ${package.sha256}'"])
  })

  # IMDSv2 alone. One hop: no container gets the machine's identity.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = var.disk_gib
    encrypted   = true
    kms_key_id  = var.disk_key_arn
  }

  lifecycle {
    # A member is never replaced or stopped because its bundle was used up or because there is a newer image. Replace a dead
    # one by name, with a ticket: see the README.
    ignore_changes = [user_data, ami]
  }
}
