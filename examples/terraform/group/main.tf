# An auto-scaling group that forms a cluster, and whose dead members are replaced under a policy. All machines have equal
# user data.
module "network" {
  source = "../modules/network"

  cluster                   = var.cluster
  vpc_id                    = var.vpc_id
  discovery_cidrs           = var.discovery_cidrs
  discovery_port            = var.discovery_port
  https_cidrs               = var.https_cidrs
  client_security_group_ids = var.client_security_group_ids
}

resource "aws_launch_template" "member" {
  name_prefix   = "muster-${var.cluster}-"
  image_id      = var.image_id
  instance_type = var.instance_type
  ebs_optimized = true

  user_data = base64encode(templatefile("${path.module}/user-data.yaml.tftpl", {
    parameter = aws_ssm_parameter.bundle.name
    region    = var.region
    packages  = join(" ", [for package in var.packages : "'${package.url} ${package.sha256}'"])
  }))

  iam_instance_profile {
    arn = aws_iam_instance_profile.member.arn
  }

  # IMDSv2 alone. One hop: no container gets the machine's identity or its role.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  network_interfaces {
    associate_public_ip_address = false
    security_groups             = [module.network.security_group_id]
  }

  # The name of the root disk in Debian's images.
  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.disk_gib
      encrypted             = true
      kms_key_id            = var.disk_key_arn
      delete_on_termination = true
    }
  }

  tag_specifications {
    resource_type = "volume"
    tags          = { Name = "muster-${var.cluster}" }
  }
}

resource "aws_autoscaling_group" "members" {
  name                = "muster-${var.cluster}"
  min_size            = var.machines
  max_size            = var.machines
  desired_capacity    = var.machines
  vpc_zone_identifier = var.subnet_ids

  # A dead machine is replaced, and nothing else: each replacement is a use of the policy. A machine whose agent waits as a
  # standby is healthy for the group, so only EC2's own checks count.
  health_check_type         = "EC2"
  health_check_grace_period = 300
  protect_from_scale_in     = true
  suspended_processes       = ["AZRebalance"]
  wait_for_capacity_timeout = "0"

  # A new version of the template is for new machines. There is no instance_refresh, which would replace members that live.
  launch_template {
    id      = aws_launch_template.member.id
    version = aws_launch_template.member.latest_version
  }

  tag {
    key                 = "Name"
    value               = "muster-${var.cluster}"
    propagate_at_launch = true
  }

  tag {
    key                 = "MusterCluster"
    value               = var.cluster
    propagate_at_launch = true
  }

  depends_on = [aws_iam_role_policy.bundle]
}
